"""Running one delegate: finding, starting and chaining its plugins, and the record of what they did."""
