"""`tuning`: sysctls and attributes of an interface that the plugins before it in the list have made.

Order, backup file and the words of the errors are those of the reference plugin (containernetworking/plugins
`plugins/meta/tuning`), so that either can restore what the other changed. Different on purpose: an ADD that fails puts
everything back, sysctls included; everything that can be refused is refused first; MAC addresses are compared and
reported in the kernel's spelling, values of sysctls without regard to which white space parts them; a packet capture
does not make an interface promiscuous; no backup stays behind where nothing is left to restore.
"""
