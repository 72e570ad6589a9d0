//! How two nodes prove that they hold one secret: each answers the other's nonce with a keyed hash
//! over both introductions and its own role, so that neither side's proof is of use to the other
//! side, to another pair of nodes, or to another start of the same ones.

use std::fmt;

use super::Introduction;

const KEY_CONTEXT: &str = "kvrail 2026-11 peer protocol key";
const PROOF_CONTEXT: &[u8] = b"kvrail peer proof v1";

/// Who proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The node that connected: it sends `Hello` and, last, `Confirm`.
    Initiator,
    /// The node that accepted: it sends `Welcome`.
    Acceptor,
}

/// The key that all nodes of a cluster derive from their shared secret.
#[derive(Clone)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// Derives the key. Any bytes will do, none among them: a cluster without a secret admits
    /// whoever reaches it and speaks the protocol.
    #[must_use]
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key(KEY_CONTEXT, secret))
    }

    /// The proof of the node in `role` on the connection that these introductions opened.
    #[must_use]
    pub fn proof(&self, role: Role, hello: &Introduction, welcome: &Introduction) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(PROOF_CONTEXT);
        hasher.update(match role {
            Role::Initiator => b"i",
            Role::Acceptor => b"a",
        });
        // The layout of an introduction is fixed, so two of them in a row are unambiguous.
        hasher.update(bytemuck::bytes_of(&hello.to_wire()));
        hasher.update(bytemuck::bytes_of(&welcome.to_wire()));
        Proof(hasher.finalize().into())
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(..)")
    }
}

/// A proof. Comparison takes the same time wherever the first difference is.
#[derive(Debug, Clone, Copy, Eq)]
pub struct Proof(pub [u8; 32]);

impl PartialEq for Proof {
    fn eq(&self, other: &Self) -> bool {
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}
