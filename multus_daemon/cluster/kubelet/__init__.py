"""The devices that the kubelet has given to a pod. The only package that imports grpc and protobuf."""
