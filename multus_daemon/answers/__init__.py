"""Answer questions about a node and its pods, for the daemon's admin paths and for `multusctl`. Nothing is changed.

An answer is a JSON object; its `schema` is `multusctl.<command>/v<number>`, and docs/multusctl.md describes it. Within
a version keys may be added; none is removed or changes its meaning.
"""
