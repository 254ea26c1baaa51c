"""`python -m multus_tools.kubectl`."""

from multus_tools.kubectl import main

if __name__ == "__main__":
    main()
