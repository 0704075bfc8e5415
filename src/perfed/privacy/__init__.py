"""What keeps a client's values from the server: encryption."""
