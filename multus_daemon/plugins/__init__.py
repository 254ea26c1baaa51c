"""Running the plugins of one attachment by the rules of libcni, as binaries or built in."""
