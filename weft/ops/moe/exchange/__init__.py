"""Base of moe_dispatch and moe_combine, and a file for each of their designs."""
