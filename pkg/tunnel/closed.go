package tunnel

// IsClosed reports whether c is closed. It never blocks. Nobody may send on c.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
