"""What tests of millpond, and of services that embed it, are built from."""
