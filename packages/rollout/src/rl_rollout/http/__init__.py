"""HTTP: the endpoint of a server in this process, the client of one elsewhere, and the messages between them."""
