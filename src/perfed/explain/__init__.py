"""Why a client's model says what it says, beside the global model and training alone."""
