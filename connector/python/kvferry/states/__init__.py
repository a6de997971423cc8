"""What is known of layers with state: which bytes of it each tensor parallel rank has."""
