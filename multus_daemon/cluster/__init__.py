"""What is declared for this node: pods, networks and devices, and where status and Events go."""
