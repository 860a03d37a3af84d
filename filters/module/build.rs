//! How the module is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The bootstrap loads the module by its path; by this name the loader then knows it again, wherever a
    // listener or a cluster asks for `libtidevoy.so`.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtidevoy.so");
}
