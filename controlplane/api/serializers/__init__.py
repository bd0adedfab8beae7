"""What the API reads and shows, one module per area. Inputs are strict: an unknown key is refused."""
