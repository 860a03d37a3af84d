//! How the module is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The bootstrap loads the module by its path. Since the loader then knows the module by this name too, a listener
    // or cluster that names `libtidevoy.so` gets the module that is already loaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtidevoy.so");
}
