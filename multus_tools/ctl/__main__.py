"""`python -m multus_tools.ctl`."""

from multus_tools.ctl import main

if __name__ == "__main__":
    main()
