"""The clients' wire formats, one module for each API."""
