"""The Kubernetes adapter. The only package that imports kubernetes_asyncio (through `library`) and cryptography."""
