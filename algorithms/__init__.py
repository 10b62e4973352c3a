"""What is optimised: advantages, losses, one short file per algorithm, and the loops that run them."""
