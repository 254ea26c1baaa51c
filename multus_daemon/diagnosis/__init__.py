"""What is asked about a node and its pods, and the answers: for the daemon's admin paths and for `multusctl` alike.

Everything here looks and changes nothing, but for what is an order by its name. An answer is a JSON object; its
`schema` is `multusctl.<command>/v<number>`, and docs/multusctl.md describes it. A number stands for a shape: keys may
be added, none goes or changes its meaning.
"""
