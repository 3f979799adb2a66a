"""What makes the documentation site: staged pages, pictures, claims and checks."""
