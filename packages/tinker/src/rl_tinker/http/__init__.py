"""HTTP server of the API, and the page that shows its work."""
