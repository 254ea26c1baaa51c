"""`python -m multus_daemon.tools.ctl`."""

from multus_daemon.tools.ctl import main

if __name__ == "__main__":
    main()
