"""What clients write on the wire, one module for each API."""
