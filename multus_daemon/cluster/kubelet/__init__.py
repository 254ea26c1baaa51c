"""The devices that the kubelet has given to a pod.

The only package that imports grpc and protobuf. It does so for the first network that needs a device: most nodes have
none.
"""
