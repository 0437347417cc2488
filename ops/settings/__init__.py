"""Settings of every role: read from files, arguments and pipes, checked, shown and handed on."""
