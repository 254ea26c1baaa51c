"""`python -m multus_daemon.ctl`."""

from multus_daemon.ctl import main

if __name__ == "__main__":
    main()
