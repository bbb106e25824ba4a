"""What commands show: the choices there are, the machine, and a run as one HTML file."""
