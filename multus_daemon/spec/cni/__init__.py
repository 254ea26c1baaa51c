"""The CNI specification: errors, names, arguments, versions, configurations, results and their conversion. Pure."""
