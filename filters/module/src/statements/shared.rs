//! A cache of objects by text, such as those that the sessions of a worker share.

use std::collections::HashMap;

/// The highest number of cached objects, and of the bytes of their texts.
pub(super) const MAX_OBJECTS: usize = 5000;
const MAX_BYTES: usize = 8 * 1024 * 1024;
/// Objects with longer texts are not cached.
const MAX_TEXT_BYTES: usize = 1024 * 1024;

/// A cache of objects by text. When it is full, it drops the objects that nothing else refers to.
pub(crate) struct Shared<T> {
    objects: HashMap<Box<[u8]>, T>,
    text_bytes: usize,
    /// Whether something outside of the cache refers to an object.
    is_used: fn(&T) -> bool,
}

impl<T: Clone> Shared<T> {
    pub(crate) fn new(is_used: fn(&T) -> bool) -> Self {
        Self { objects: HashMap::new(), text_bytes: 0, is_used }
    }

    pub(crate) fn get(&self, text: &[u8]) -> Option<T> {
        self.objects.get(text).cloned()
    }

    /// Adds an object, if there is room.
    pub(crate) fn add(&mut self, text: &[u8], object: &T) {
        if text.len() > MAX_TEXT_BYTES {
            return;
        }
        if !self.has_room(text) {
            self.objects.retain(|_, object| (self.is_used)(object));
            self.text_bytes = self.objects.keys().map(|text| text.len()).sum();
        }
        if self.has_room(text) && self.objects.insert(text.into(), object.clone()).is_none() {
            self.text_bytes += text.len();
        }
    }

    fn has_room(&self, text: &[u8]) -> bool {
        self.objects.len() < MAX_OBJECTS && self.text_bytes + text.len() <= MAX_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    fn shared() -> Shared<Rc<usize>> {
        Shared::new(|object| Rc::strong_count(object) > 1)
    }

    #[test]
    fn unused_objects_make_room() {
        let mut shared = shared();
        let used = Rc::new(0);
        shared.add(b"used", &used);
        for number in 0..2 * MAX_OBJECTS {
            shared.add(number.to_string().as_bytes(), &Rc::new(number));
            assert!(shared.objects.len() <= MAX_OBJECTS);
        }
        assert_eq!(shared.get((2 * MAX_OBJECTS - 1).to_string().as_bytes()).as_deref(), Some(&(2 * MAX_OBJECTS - 1)));
        assert_eq!(shared.get(b"0"), None);
        assert!(shared.get(b"used").is_some_and(|object| Rc::ptr_eq(&object, &used)));
    }

    #[test]
    fn long_texts_take_no_more_than_their_limit() {
        let mut shared = shared();
        let mut used = Vec::new();
        for number in 0..=2 * MAX_BYTES / MAX_TEXT_BYTES {
            let mut text = number.to_string().into_bytes();
            text.resize(MAX_TEXT_BYTES, b' ');
            used.push(Rc::new(number));
            shared.add(&text, &used[number]);
            assert_eq!(shared.get(&text).is_some(), number < MAX_BYTES / MAX_TEXT_BYTES);
        }
        used.clear();
        shared.add(b"short", &Rc::new(1));
        assert_eq!((shared.objects.len(), shared.text_bytes), (1, 5));
        shared.add(&vec![b'a'; MAX_TEXT_BYTES + 1], &Rc::new(2));
        assert_eq!(shared.objects.len(), 1);
    }
}
