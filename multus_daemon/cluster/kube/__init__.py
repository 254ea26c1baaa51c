"""The Kubernetes adapter: pods and networks from the API server, status and events back to it.

The only package that knows kubernetes_asyncio, and of that only how a configuration and its credentials are read
(`library` imports it).
"""
