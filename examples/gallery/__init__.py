"""Small scripts, one for each question; the tests run them."""
