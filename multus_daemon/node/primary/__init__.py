"""The node's CNI configuration: the primary configuration is elected, wrapped and kept in place."""
