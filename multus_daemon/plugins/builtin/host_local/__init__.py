"""The IPAM plugin `host-local`: addresses from ranges, each a file in a directory of this node.

Same configuration, same directory and same answers as the reference plugin
(containernetworking/plugins `plugins/ipam/host-local`), so that the two can work on one directory in turns.
"""
