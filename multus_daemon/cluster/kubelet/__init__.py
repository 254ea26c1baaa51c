"""Which devices the kubelet has given to a pod: podresources over gRPC, else its checkpoint file.

The only package that knows grpc and protobuf. They are imported for the first network that needs a device: most nodes
have none.
"""
