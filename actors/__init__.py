"""The five actors of a house; none imports another, but for the supervisor that starts them."""
