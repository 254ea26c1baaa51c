"""Programs for people: `multusctl`, `kubectl multus`, `multus-builtin`. The daemon never imports them."""
