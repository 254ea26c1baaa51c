"""`flannel`: has another plugin, `bridge` as a rule, attach the container to what flanneld has assigned to the node.

Composed configuration, saved file and the words of the errors are those of the reference plugin
(flannel-io/cni-plugin), so that either can remove what the other made. Different on purpose: an ADD that fails calls
the delegate's DEL (CNI SPEC section 4), unless the interface was there before; a DEL that fails keeps the saved file,
so that it can be repeated.
"""
