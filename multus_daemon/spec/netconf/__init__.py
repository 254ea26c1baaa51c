"""Our own CNI network configuration: its model, its reading and its generation. Pure."""
