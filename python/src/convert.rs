//! Plain values between Python and the engine: settings, geometry, identities.
