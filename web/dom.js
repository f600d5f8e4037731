// Two short words for what every module of the page does.

/** @param {string} id @returns {any} */
export const $ = (id) => document.getElementById(id);

/** @param {string} tag @param {object} properties textContent, className and the like @returns {any} */
export const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);
