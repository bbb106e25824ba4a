"""Messages: how they are framed, who may send them, what they ask of the bookkeeping."""
