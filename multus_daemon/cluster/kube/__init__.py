"""The Kubernetes adapter: pods and networks from the API server, status and Events back to it.

The only package that imports kubernetes_asyncio (through `library`), to read configurations and credentials.
"""
