"""What operators asked for: pure changes, and the repository that saves them."""
