"""`python -m multus_daemon.kubectl`."""

from multus_daemon.kubectl import main

if __name__ == "__main__":
    main()
