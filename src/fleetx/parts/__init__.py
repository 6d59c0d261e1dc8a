"""One file or package per strategy, usually named after its switch."""
