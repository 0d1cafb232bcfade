"""Parts of the command line: options that commands share, and commands that have some of their own."""
