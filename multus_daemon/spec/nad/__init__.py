"""The NPWG multi-network specification: selection elements, definitions, status, device information. Pure."""
