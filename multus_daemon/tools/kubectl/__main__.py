"""`python -m multus_daemon.tools.kubectl`."""

from multus_daemon.tools.kubectl import main

if __name__ == "__main__":
    main()
