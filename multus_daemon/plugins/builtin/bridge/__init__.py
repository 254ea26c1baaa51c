"""`bridge`: a veth pair whose host end is a port of a bridge, which may be the containers' gateway.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/bridge`), so that either can
remove what the other made. Different on purpose: an ADD that fails leaves nothing of its container behind (the bridge
and its addresses are the network's, and stay as after a DEL); everything that can be refused is refused first; rules
of a container whose namespace has gone are removed; CHECK works without an IPAM plugin.
"""
