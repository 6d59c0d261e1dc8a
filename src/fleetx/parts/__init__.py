"""One file a strategy. The name of the file is the name of the switch."""
