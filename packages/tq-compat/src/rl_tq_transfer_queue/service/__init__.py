"""The controller as a service: its sockets, and the process or Ray actor of a job that hosts it."""
