"""What the commands of `megavm` do, and the options and the output that they share."""
