"""The kernel: network namespaces, links, addresses, routes, sysctls. The only user of netlink sockets."""
